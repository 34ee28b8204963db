"""Every private name of torch that this library reads: the only place that knows them."""

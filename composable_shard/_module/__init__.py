"""What a sharded module has of its own: methods, state, and the parameters in their places."""

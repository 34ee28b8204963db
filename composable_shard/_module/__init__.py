"""The sharded module: its class, methods, state and parameters."""

"""Parameters that share a collective: how they are laid out, gathered, reduced and put back."""

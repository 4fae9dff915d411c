"""Parameters: thin modules over hetsngp.functional."""

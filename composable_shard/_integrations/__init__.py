"""How other libraries, and scripts that are not changed, come to use this one."""

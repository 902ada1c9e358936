"""The command `autoptd`: the functions of the package for the shell, with tables and exit codes."""

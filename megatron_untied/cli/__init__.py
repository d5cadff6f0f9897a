"""The command line: flags, and the configuration that they make."""

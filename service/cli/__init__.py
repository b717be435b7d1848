"""Command line `kvasir`."""

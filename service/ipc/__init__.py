"""Messages and state shared by the processes of a service."""

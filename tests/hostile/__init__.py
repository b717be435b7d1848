"""What nobody should send, and machines that nobody should have: the service answers, or says why not."""

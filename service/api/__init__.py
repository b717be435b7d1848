"""Route handlers of the API process."""

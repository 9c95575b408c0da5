"""The hypercast command."""

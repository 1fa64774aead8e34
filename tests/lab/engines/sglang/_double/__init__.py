"""The parts of the double. Nothing here exists under this name in the real package."""

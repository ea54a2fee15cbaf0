"""Sum gradients over ranks."""

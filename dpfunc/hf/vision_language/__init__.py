"""Vision-language models: what is trained, and batches of images with text."""

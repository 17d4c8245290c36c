"""What the scripts at the root are made of: one noun a file, opened by what it holds."""

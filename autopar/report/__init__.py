"""Report: what people watch and read: progress, text, pages."""

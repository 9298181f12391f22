"""The service: one adapter behind HTTP, with a page that shows what the model is doing."""

"""Virtual machines that appear as clones of a template that has booted already: docs/VM.md."""

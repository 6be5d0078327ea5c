"""The `dsec` command: thin verbs over the SDK, and what concerns this host (`serve`, `doctor`, `bench`, `host
undo`)."""

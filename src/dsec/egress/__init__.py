"""The way out of a sandbox, by name only: what arrives from inside is decided by its policy, noted, and connected."""

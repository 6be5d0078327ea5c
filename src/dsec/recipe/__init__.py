"""Dockerfiles as text: what one says (`dockerfile`), its words and variables (`words`), and which files of a context
count (`ignore`). Pure: client and server use the same."""

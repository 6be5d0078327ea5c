"""Environments built from instructions: Dockerfiles, and whatever else says RUN and COPY (E2B's templates).

`files` are trees with their contents (a context, what a stage holds), `copying` makes layers of files, `workshop` does
steps and remembers them, `interpreter` reads a Dockerfile, `service` is what callers use.
"""

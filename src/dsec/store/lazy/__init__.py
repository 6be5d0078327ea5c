"""Layers whose data comes when it is read.

holder.py     the C program that holds the kernel's questions: its socket
cache.py      what a layer has on this node's disk so far
readahead.py  which chunks to fetch for a read (pure)
fetch.py      chunks from the store into the cache, each once
filler.py     the process that answers the holder
service.py    the server's side: keeps both programs running, mounts
"""

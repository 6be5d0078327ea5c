"""Virtual machine monitors (VMMs), for every backend whose sandboxes are machines: the launcher, drivers, their control
sockets, machines that run and their disks."""

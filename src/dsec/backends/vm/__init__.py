"""Full virtual machines: any bootable disk, with its own boot loader, kernel and first program."""

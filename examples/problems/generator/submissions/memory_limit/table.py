n = int(input())
x = bytearray(8 * n)
x[::4096] = bytes([1]) * len(range(0, len(x), 4096))
print(1)

n = int(input())
x, factor, step = 1, 69069, 5
while n:
    if n & 1:
        x = (factor * x + step) % 2**32
    factor, step = factor * factor % 2**32, (factor * step + step) % 2**32
    n >>= 1
print(x)

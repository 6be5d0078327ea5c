n = int(input())
print(sum(all(i % j for j in range(2, i)) for i in range(2, n + 1)))

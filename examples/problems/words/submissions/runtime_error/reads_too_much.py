words = [input().split() for _ in range(2)]
print(words[0][0])

for i in range(int(input()), -1, -1):
    print(i)

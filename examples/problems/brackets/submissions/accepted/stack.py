pairs = {")": "(", "]": "["}
stack = []
good = True
for each in input().strip():
    if each in pairs:
        good = good and bool(stack) and stack.pop() == pairs[each]
    else:
        stack.append(each)
print("yes" if good and not stack else "no")

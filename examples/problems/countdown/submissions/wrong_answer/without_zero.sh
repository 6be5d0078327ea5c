read -r n
seq "$n" -1 1

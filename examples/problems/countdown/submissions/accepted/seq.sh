read -r n
seq "$n" -1 0

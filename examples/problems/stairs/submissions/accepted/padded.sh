read -r n
stars=""
for ((i = 1; i <= n; i++)); do
    stars="*$stars"
    printf "%${n}s\n" "$stars"
done

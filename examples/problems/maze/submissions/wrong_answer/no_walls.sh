mapfile -t maze
echo $((${#maze[@]} + ${#maze[0]} - 2))

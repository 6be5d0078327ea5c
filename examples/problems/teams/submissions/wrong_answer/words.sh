echo "the strong ones"

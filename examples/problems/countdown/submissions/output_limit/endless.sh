while true; do echo 0; done

package socketlb

module proxier.example/ci/api

go 1.26.0

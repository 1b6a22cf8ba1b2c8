// Package api checks the exported API of the library: it must be recorded in api.txt, only
// deprecated API may be removed, and everything must be documented.
//
//	go test .            (with GOWORK=off, in this folder)
//	go test . -update    after an intended change; reviewers check the diffs of api.txt and users.txt
//
// users.txt says which packages use each identifier in product files. ports.txt has the names that three
// vendors' ports use, which must stay or have a successor: no program of the tree may use them.
// unused.txt has the names without any user, with the reason why each stays.
//
// It checks the packages as built for Linux, which are all packages.
package api

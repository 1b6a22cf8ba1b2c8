// Package manifests reads Kubernetes objects from files and follows what is
// done to the files, for agents that are to run without an API server.
//
// A [Reader] is given a file, or a folder whose files ending in .yaml, .yml and
// .json are read (not those beginning with a dot, and not folders within it).
// Files hold Services, EndpointSlices, Nodes and ServiceCIDRs, as YAML documents
// or JSON values, alone or in Lists, in the form in which people write them or
// "kubectl get -o yaml" prints them. Each [Reader.Read] looks at the files again
// and tells what is different: objects to hand in, names that are gone, and
// what could not be read, by file and line.
//
// What is bad costs only itself: a document, or an item of a List, is reported
// and treated as if it were not there. An object that is in the files twice is
// reported, and the first one counts, by file name and then by position. A file
// that cannot be opened is reported and keeps standing for what it last held;
// one that is gone takes its objects with it.
//
// What the API server would fill in is filled in, as far as a node agent looks
// at it: the namespace "default", protocols, port names and the timeout of
// session affinity.
//
// A [Watcher] (Linux) waits for the files to change. It knows about files that
// are still being written, so that half of one is not taken for all of it, and
// about files and folders that are replaced by renaming, as mounted ConfigMaps
// are.
package manifests

// Package manifests reads Kubernetes objects from files and follows changes of the files,
// for agents that run without an API server.
//
// A [Reader] reads one file, or the files of a folder whose names end in .yaml, .yml or
// .json. It ignores names that begin with a dot, and subfolders. Files hold Services,
// EndpointSlices, Nodes and ServiceCIDRs, as "kubectl get -o yaml" prints them. Each [Reader.Read] reads the files again
// and returns the differences: new and changed objects, the names of removed objects, and problems.
//
// Bad syntax, such as a key that is there twice, affects one document, and any other problem one item of a List. The
// Reader reports it with the line and skips the document or the item. If the files hold an object twice, the Reader
// reports that and uses the first one, by file name and then by position. It reports a file that it cannot open, or with
// which the files have more than 512 MiB together, and keeps the objects that it last read from it. The objects of a
// removed file are removed.
//
// The Reader sets the API server's defaults of the fields that a node agent reads. It uses an object that an API server
// would refuse or complete as it is, and reports it.
//
// A [Watcher] (Linux) waits for changes of the files, until a file is completely written. It notices files and
// folders that are replaced by renaming, as in mounted ConfigMaps.
package manifests

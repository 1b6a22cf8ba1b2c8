// Package patterns shows common tasks of data plane vendors in compiled and tested examples. It has no code of
// its own.
//
//   - Example_annotations: a vendor's own data in an annotation of a Service. Only a
//     change of the data reprograms the Service.
//   - Example_selection: a proxy that serves some Services only, by label or by class.
//   - Example_lookup: the Service behind the address of a frontend or of an endpoint, for
//     flow logs and policies.
//   - Example_followers: a health check and the clean-up of stale flows beside a data
//     plane, each with its own position in the changes.
//
// Packages ovs and bpfmaps and program userspace, beside this folder, are whole third-party data planes.
package patterns

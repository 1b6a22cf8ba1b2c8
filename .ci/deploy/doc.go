// Package deploy builds nodeproxy's kustomize overlays and Helm chart. The command in the folder render
// prints the objects.
package deploy

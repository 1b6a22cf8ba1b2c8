// Package deploy builds nodeproxy's kustomize overlays and Helm chart in its tests.
package deploy

// Package deploy builds nodeproxy's kustomize overlays in its test.
package deploy

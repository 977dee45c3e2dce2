"""GKE: manifests of JobSets, and a small client of the API, without the 119 MB of the official one."""

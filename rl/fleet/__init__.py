"""The devices of each role: described, resolved into hosts and meshes, and planned by the compiler."""

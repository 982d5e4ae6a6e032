"""Stand-ins for packages whose service cannot be reached: put this directory on the path of a worker's process."""

"""acclimate inside other libraries, one file each. Nothing here is imported unless you import it."""

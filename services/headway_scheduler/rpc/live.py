"""The live side of nodes and endpoints, as the Admin service sees it."""



__all__ = ["LiveFleet"]

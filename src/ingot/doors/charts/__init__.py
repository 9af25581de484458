"""Line charts, in a terminal or as a picture; what is drawn is a list of panels."""

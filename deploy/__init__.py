"""What a run is deployed and watched with. No part of the distribution."""

"""Model families: their config readers, tensor names and tensor layouts."""

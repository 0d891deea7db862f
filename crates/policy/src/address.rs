//! Address ranges, and which addresses are public.

use serde::{Deserialize, Serialize};
use std::{
    fmt,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
    str::FromStr,
};

/// What kind of address it is, for the reason of a refusal.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum AddressClass {
    /// Routed on the internet.
    Public,
    /// The host's own loopback.
    Loopback,
    /// Link-local, among them the metadata services of clouds.
    LinkLocal,
    /// A cloud's metadata or wire server outside the link-local range.
    Metadata,
    /// RFC 1918, and unique local IPv6.
    Private,
    /// Carrier-grade NAT.
    Shared,
    /// Documentation and benchmarking.
    Documentation,
    /// Multicast, unspecified, broadcast, reserved, and transition mechanisms that hide another address.
    Reserved,
}

impl AddressClass {
    /// How a refusal calls it.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Public => "public",
            Self::Loopback => "loopback",
            Self::LinkLocal => "link-local or metadata",
            Self::Metadata => "metadata",
            Self::Private => "private",
            Self::Shared => "shared (carrier NAT)",
            Self::Documentation => "documentation or benchmark",
            Self::Reserved => "reserved",
        }
    }

    /// Whether a rule that names such a range may open it. A machine's loopback is its own, and the reserved ranges lead
    /// nowhere.
    #[must_use]
    pub fn can_be_opened(self) -> bool {
        !matches!(self, Self::Loopback | Self::Reserved)
    }
}

/// IANA's special-purpose registry, narrower blocks first. 168.63.129.16 is Azure's wire server, which is in no
/// special range.
const SPECIAL_V4: &[(Ipv4Addr, u8, AddressClass)] = {
    use AddressClass as C;
    const fn a(a: u8, b: u8, c: u8, d: u8) -> Ipv4Addr {
        Ipv4Addr::new(a, b, c, d)
    }
    &[
        (a(168, 63, 129, 16), 32, C::Metadata),
        (a(100, 100, 100, 200), 32, C::Metadata),
        (a(0, 0, 0, 0), 8, C::Reserved),
        (a(10, 0, 0, 0), 8, C::Private),
        (a(100, 64, 0, 0), 10, C::Shared),
        (a(127, 0, 0, 0), 8, C::Loopback),
        (a(169, 254, 0, 0), 16, C::LinkLocal),
        (a(172, 16, 0, 0), 12, C::Private),
        (a(192, 0, 0, 0), 24, C::Reserved),
        (a(192, 0, 2, 0), 24, C::Documentation),
        (a(192, 88, 99, 0), 24, C::Reserved),
        (a(192, 168, 0, 0), 16, C::Private),
        (a(198, 18, 0, 0), 15, C::Documentation),
        (a(198, 51, 100, 0), 24, C::Documentation),
        (a(203, 0, 113, 0), 24, C::Documentation),
        (a(224, 0, 0, 0), 4, C::Reserved),
        (a(240, 0, 0, 0), 4, C::Reserved),
    ]
};

/// As [`SPECIAL_V4`]; everything outside 2000::/3 is special too.
const SPECIAL_V6: &[(Ipv6Addr, u8, AddressClass)] = {
    use AddressClass as C;
    const fn a(a: u16, b: u16, c: u16, h: u16) -> Ipv6Addr {
        Ipv6Addr::new(a, b, c, 0, 0, 0, 0, h)
    }
    &[
        (a(0, 0, 0, 1), 128, C::Loopback),
        (a(0xfe80, 0, 0, 0), 10, C::LinkLocal),
        (a(0xfec0, 0, 0, 0), 10, C::Private),
        (a(0xfc00, 0, 0, 0), 7, C::Private),
        (a(0x2001, 0xdb8, 0, 0), 32, C::Documentation),
        (a(0x3fff, 0, 0, 0), 20, C::Documentation),
        (a(0x2001, 2, 0, 0), 48, C::Documentation),
        (a(0x2001, 0, 0, 0), 23, C::Reserved), // Teredo, ORCHID and other protocol assignments
        (a(0x2002, 0, 0, 0), 16, C::Reserved), // 6to4 hides an IPv4 address
    ]
};

/// The IPv4 address that this one really means: IPv4-mapped, IPv4-compatible, and behind the well-known NAT64 prefix.
fn embedded(address: Ipv6Addr) -> Option<Ipv4Addr> {
    let s = address.segments();
    let v4 = || Ipv4Addr::from((u32::from(s[6]) << 16) | u32::from(s[7]));
    let compatible = s[..6] == [0; 6] && (s[6] != 0 || s[7] > 1);
    let mapped = s[..6] == [0, 0, 0, 0, 0, 0xffff];
    let nat64 = s[..6] == [0x64, 0xff9b, 0, 0, 0, 0];
    (compatible || mapped || nat64).then(v4)
}

/// The address as it is compared and classified: embedded IPv4 addresses are taken out of their IPv6 wrapping.
pub(crate) fn canonical(address: IpAddr) -> IpAddr {
    match address {
        IpAddr::V6(v6) => embedded(v6).map_or(address, IpAddr::V4),
        IpAddr::V4(_) => address,
    }
}

/// The special block an address is in, if any. Outside the listed blocks but not public IPv6: a block of its own size.
fn special(address: IpAddr) -> Option<(IpRange, AddressClass)> {
    match canonical(address) {
        IpAddr::V4(v4) => SPECIAL_V4
            .iter()
            .map(|(base, prefix, class)| (IpRange { base: (*base).into(), prefix: *prefix }, *class))
            .find(|(block, _)| block.contains(v4.into())),
        IpAddr::V6(v6) => SPECIAL_V6
            .iter()
            .map(|(base, prefix, class)| (IpRange { base: (*base).into(), prefix: *prefix }, *class))
            .find(|(block, _)| block.contains(v6.into()))
            .or_else(|| {
                let global = v6.segments()[0] & 0xe000 == 0x2000;
                (!global).then_some((IpRange { base: v6.into(), prefix: 128 }, AddressClass::Reserved))
            }),
    }
}

/// What kind of address it is.
#[must_use]
pub fn classify(address: IpAddr) -> AddressClass {
    special(address).map_or(AddressClass::Public, |(_, class)| class)
}

/// An address range, such as `10.1.0.0/16`; a single address is a range of one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct IpRange {
    base: IpAddr,
    prefix: u8,
}

/// Why a text is not an address range.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum IpRangeError {
    /// Not an address.
    #[error("{0:?} is not an address")]
    Address(String),
    /// Not a prefix length for that kind of address.
    #[error("/{0} is not a prefix length here")]
    Prefix(String),
    /// Host bits are set.
    #[error("{given} has bits set behind the prefix (did you mean {meant}?)")]
    HostBits {
        /// What was written.
        given: String,
        /// The range it lies in.
        meant: IpRange,
    },
}

impl IpRange {
    /// A range of one address.
    #[must_use]
    pub fn single(address: IpAddr) -> Self {
        let base = canonical(address);
        Self { base, prefix: bits(base) }
    }

    /// Whether the address lies inside; an IPv4-mapped or NAT64 address counts as the IPv4 address it means.
    #[must_use]
    pub fn contains(&self, address: IpAddr) -> bool {
        mask(canonical(address), self.prefix, bits(self.base)) == Some(self.base)
    }

    /// Whether it is one address.
    #[must_use]
    pub fn is_single(&self) -> bool {
        self.prefix == bits(self.base)
    }

    /// First address.
    #[must_use]
    pub fn base(&self) -> IpAddr {
        self.base
    }

    /// Whether this range was plainly meant to open the non-public `address`: it lies wholly in the special block of
    /// that address. 10.1.0.0/16 opens private addresses; 0.0.0.0/0 does not.
    #[must_use]
    pub(crate) fn opens(&self, address: IpAddr) -> bool {
        match special(address) {
            None => true,
            Some((block, class)) => {
                class.can_be_opened()
                    && self.contains(address)
                    && block.contains(self.base)
                    && self.prefix >= block.prefix
            }
        }
    }
}

fn bits(address: IpAddr) -> u8 {
    if address.is_ipv4() { 32 } else { 128 }
}

/// The address with everything behind the prefix cleared; `None` for the other family.
fn mask(address: IpAddr, prefix: u8, family_bits: u8) -> Option<IpAddr> {
    let gone = u32::from(family_bits.checked_sub(prefix)?);
    match address {
        IpAddr::V4(v4) if family_bits == 32 => {
            let kept = u32::MAX.checked_shl(gone).unwrap_or(0);
            Some(Ipv4Addr::from(u32::from(v4) & kept).into())
        }
        IpAddr::V6(v6) if family_bits == 128 => {
            let kept = u128::MAX.checked_shl(gone).unwrap_or(0);
            Some(Ipv6Addr::from(u128::from(v6) & kept).into())
        }
        _ => None,
    }
}

impl FromStr for IpRange {
    type Err = IpRangeError;
    fn from_str(text: &str) -> Result<Self, IpRangeError> {
        let (address, prefix) = match text.split_once('/') {
            Some((address, prefix)) => (address, Some(prefix)),
            None => (text, None),
        };
        let base: IpAddr = address.parse().map_err(|_| IpRangeError::Address(address.to_owned()))?;
        let Some(prefix) = prefix else { return Ok(Self::single(base)) };
        let ok = !prefix.is_empty() && prefix.len() <= 3 && prefix.bytes().all(|b| b.is_ascii_digit());
        let length: u8 = prefix
            .parse()
            .ok()
            .filter(|n| ok && *n <= bits(base))
            .ok_or_else(|| IpRangeError::Prefix(prefix.to_owned()))?;
        let masked = mask(base, length, bits(base)).expect("the prefix was checked against the family");
        let range = Self { base: masked, prefix: length };
        if masked == base { Ok(range) } else { Err(IpRangeError::HostBits { given: text.to_owned(), meant: range }) }
    }
}

impl TryFrom<String> for IpRange {
    type Error = IpRangeError;
    fn try_from(text: String) -> Result<Self, IpRangeError> {
        text.parse()
    }
}

impl From<IpRange> for String {
    fn from(range: IpRange) -> String {
        range.to_string()
    }
}

impl fmt::Display for IpRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.is_single() { write!(f, "{}", self.base) } else { write!(f, "{}/{}", self.base, self.prefix) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_public_addresses_are_public() {
        use AddressClass as C;
        for (text, class) in [
            ("1.1.1.1", C::Public),
            ("2606:4700::1111", C::Public),
            ("10.1.2.3", C::Private),
            ("172.31.255.255", C::Private),
            ("172.32.0.0", C::Public),
            ("192.168.1.1", C::Private),
            ("100.64.0.1", C::Shared),
            ("100.128.0.1", C::Public),
            ("100.100.100.200", C::Metadata),
            ("127.0.0.53", C::Loopback),
            ("169.254.169.254", C::LinkLocal),
            ("168.63.129.16", C::Metadata),
            ("198.19.255.255", C::Documentation),
            ("203.0.113.5", C::Documentation),
            ("198.51.100.5", C::Documentation),
            ("192.0.2.5", C::Documentation),
            ("0.0.0.0", C::Reserved),
            ("224.0.0.1", C::Reserved),
            ("255.255.255.255", C::Reserved),
            ("250.1.2.3", C::Reserved),
            ("::1", C::Loopback),
            ("::", C::Reserved),
            ("fe80::1", C::LinkLocal),
            ("fd00:ec2::254", C::Private),
            ("fc00::1", C::Private),
            ("ff02::1", C::Reserved),
            ("2001:db8::1", C::Documentation),
            ("2002:0a00:0001::", C::Reserved),
            ("2001:0:1::1", C::Reserved),
            ("::ffff:10.0.0.1", C::Private),
            ("::ffff:1.1.1.1", C::Public),
            ("::10.0.0.1", C::Private),
            ("64:ff9b::169.254.169.254", C::LinkLocal),
            ("64:ff9b::127.0.0.1", C::Loopback),
            ("64:ff9b:1::1", C::Reserved),
            ("4000::1", C::Reserved),
        ] {
            assert_eq!(classify(text.parse().unwrap()), class, "{text}");
        }
    }

    #[test]
    fn ranges_contain_what_they_say() {
        let range: IpRange = "10.1.0.0/16".parse().unwrap();
        assert!(range.contains("10.1.255.255".parse().unwrap()));
        assert!(range.contains("::ffff:10.1.0.1".parse().unwrap()));
        assert!(!range.contains("10.2.0.0".parse().unwrap()));
        assert!(!range.contains("fd00::1".parse().unwrap()));
        let all: IpRange = "0.0.0.0/0".parse().unwrap();
        assert!(all.contains("1.2.3.4".parse().unwrap()));
        assert!(!all.contains("2606::1".parse().unwrap()));
        for text in ["10.1.0.0/33", "10.1.0.0/", "10.1.0.0/-1", "x/8", "10.1.2.3/16", "fe80::/129"] {
            assert!(text.parse::<IpRange>().is_err(), "{text}");
        }
    }

    #[test]
    fn a_wide_range_does_not_open_private_addresses() {
        let private = "10.1.2.3".parse().unwrap();
        assert!("10.0.0.0/8".parse::<IpRange>().unwrap().opens(private));
        assert!("10.1.2.3".parse::<IpRange>().unwrap().opens(private));
        assert!(!"0.0.0.0/0".parse::<IpRange>().unwrap().opens(private));
        assert!(!"8.0.0.0/5".parse::<IpRange>().unwrap().opens(private));
        assert!(!"127.0.0.0/8".parse::<IpRange>().unwrap().opens("127.0.0.1".parse().unwrap()));
    }
}
